"""Changes a server's code from outside, as a fault would: no hook for tests in the code itself."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from tests.conftest import ROOT

_SITECUSTOMIZE = """
import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        exec_module = spec.loader.exec_module

        def exec_and_change(module):
            exec_module(module)
            change(module)

        spec.loader.exec_module = exec_and_change
        return spec


{change}

sys.meta_path.insert(0, Finder())
"""


def changing(module: str, change: str, folder: Path) -> dict[str, str]:
    """The environment in which every process calls `change(module)` when it has imported `module`.

    `change` is the source of that function; the plugin is written to `folder`.
    """
    source = _SITECUSTOMIZE.format(module=module, change=textwrap.dedent(change))
    (folder / "sitecustomize.py").write_text(source)
    path = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
