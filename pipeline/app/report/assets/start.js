"use strict";
(async function () {
  try {
    const main = await report.open("data-main");
    report.graphs(main.graphs);
    report.rollouts(await report.open("data-rollouts"), main.names);
    report.curves(main.curves);
    report.phases(main.phases, main.lanes);
    await report.timelines();
  } catch (error) {
    const text = typeof DecompressionStream === "undefined" ? "This browser is too old to open the data (it has no DecompressionStream)." : `The page's data could not be opened: ${error.message}`;
    document.querySelector("main").prepend(report.el("p", { class: "notes", role: "alert" }, text));
    throw error;
  }
  document.documentElement.dataset.ready = "true";
})();
