"use strict";
// A served page asks whether its runs have grown, and loads itself again; what was chosen and the place stay.
(function () {
  const bar = document.getElementById("live");
  if (!bar) return;
  const pause = bar.querySelector("input"), said = bar.querySelector("span"), PLACE = "creditgraph-place";
  const before = Number(sessionStorage.getItem(PLACE));
  sessionStorage.removeItem(PLACE);
  const ready = new MutationObserver(() => { if (document.documentElement.dataset.ready) { ready.disconnect(); if (before) window.scrollTo(0, before); } });
  ready.observe(document.documentElement, { attributes: true });
  const opened = performance.now(), LEAST = 15000; // milliseconds between two loads
  const ask = async () => {
    try {
      const reply = await fetch("state", { cache: "no-store" });
      if (!reply.ok) throw new Error(String(reply.status));
      const grown = (await reply.text()) !== bar.dataset.state;
      said.textContent = grown ? "the runs have grown" : "up to date";
      const typing = document.activeElement && /INPUT|SELECT/.test(document.activeElement.tagName) && document.activeElement !== pause;
      if (grown && !pause.checked && !typing && performance.now() - opened > LEAST) { sessionStorage.setItem(PLACE, String(window.scrollY)); location.reload(); return; }
    } catch { said.textContent = "the server does not answer; start creditgraph watch again"; }
    setTimeout(ask, 5000);
  };
  setTimeout(ask, 5000);
})();
