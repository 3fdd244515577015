"""A run that waits where a test needs it to: nothing then depends on how fast the machine is."""

import os
import time
from pathlib import Path

from creditgraph.components.prompts.dataset import DatasetPrompts, Outputs


class GatedPrompts(DatasetPrompts):
    """Problems of `prompts.dataset`, held back from the iteration on whose number is in $CREDITGRAPH_TEST_GATE.

    Who waits at iteration n leaves the file $CREDITGRAPH_TEST_GATE.n.RANK.
    """

    def run(self) -> Outputs:
        gate = os.environ.get("CREDITGRAPH_TEST_GATE")
        while gate and self.context.iteration >= int(Path(gate).read_text()):
            Path(f"{gate}.{self.context.iteration}.{os.environ.get('SLURM_PROCID')}").touch()
            time.sleep(0.02)
        return super().run()


class DyingPrompts(DatasetPrompts):
    """Ends with an error that no sentence explains."""

    def run(self) -> Outputs:
        raise RuntimeError("as ordered")
