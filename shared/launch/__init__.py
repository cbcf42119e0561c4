"""Starting, naming, watching and ending processes; the private run directory; the HTTP port.

`Stage` says what a stage is, `run_server` serves it over HTTP, `launch_processes` starts it without HTTP, and
`Supervisor` is how any process of this project has children.  Everything that only Linux can do has its
portable fallback here and nowhere else.
"""

from shared.launch.process_tree import ProcessNode, format_tree
from shared.launch.server import run_server
from shared.launch.stage import LaunchedProcesses, Stage, launch_processes
from shared.launch.supervisor import ChildFailed, Supervisor

__all__ = [
    "ChildFailed",
    "LaunchedProcesses",
    "ProcessNode",
    "Stage",
    "Supervisor",
    "format_tree",
    "launch_processes",
    "run_server",
]
