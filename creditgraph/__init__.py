"""creditgraph: the public names for plug-ins.

    from creditgraph import Component, Credit, Trajectories, same_rows

`__init__.pyi` lists the names. One is imported on first use, so `creditgraph --help` does not wait for torch.

In a checkout the folders `pipeline`, `components`, `configs` and `slurm` of this package are links to those beside it;
an installed package holds them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
