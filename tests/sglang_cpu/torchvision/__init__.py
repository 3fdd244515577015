"""Stands in for torchvision where SGLang runs a text model on a CPU in tests.

SGLang and transformers import many of its names and use none for text. Capitalised names are empty classes, others
modules; calling one raises. `InterpolationMode` is a real enumeration because transformers builds a table from it at
import.
"""

import enum
import importlib.machinery
import sys
import types

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    __path__ = []

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        result = type(name, (), {}) if name[0].isupper() else _Module(f"{self.__name__}.{name}")
        setattr(self, name, result)
        return result

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__}: tests/sglang_cpu stands in for torchvision, for text models only.")


def _submodule(path):
    parent, _, name = path.rpartition(".")
    module = _Module(f"torchvision.{path}")
    if parent:
        setattr(sys.modules[f"torchvision.{parent}"], name, module)
    return module


io, ops, transforms = (_submodule(name) for name in ("io", "ops", "transforms"))
for _path in ("ops.boxes", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _submodule(_path)
for _owner in (transforms, transforms.functional, transforms.v2, transforms.v2.functional):
    _owner.InterpolationMode = InterpolationMode
