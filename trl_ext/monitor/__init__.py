"""The progress line and the report of a run, which our trainers use by default.

Names load on first use: `import trl_ext.monitor` imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "ProgressLine": "trl_ext.monitor.progress",
    "write_report": "trl_ext.monitor.pages.report",
}

__all__ = ["ProgressLine", "write_report"]

if TYPE_CHECKING:
    from trl_ext.monitor.pages.report import write_report
    from trl_ext.monitor.progress import ProgressLine


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl_ext.monitor' has no attribute '{name}'. It offers {', '.join(_HOME)}.")
    return getattr(import_module(_HOME[name]), name)
