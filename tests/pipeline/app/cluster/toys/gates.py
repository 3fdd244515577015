"""A run that waits where a test wants it to: nothing then depends on how fast the machine is."""

import os
import time
from pathlib import Path

from components.prompts.dataset import DatasetPrompts, Outputs


class GatedPrompts(DatasetPrompts):
    """Problems of `prompts.dataset`, held back from the iteration on whose number is in $CREDITGRAPH_TEST_GATE."""

    def run(self) -> Outputs:
        gate = os.environ.get("CREDITGRAPH_TEST_GATE")
        while gate and self.context.iteration >= int(Path(gate).read_text()):
            time.sleep(0.02)
        return super().run()
