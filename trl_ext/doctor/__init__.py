"""Check that this machine can train, and can run a plan: facts as data, findings as sentences.

    from trl_ext.memory import read_plan
    from trl_ext.doctor import examine, look

    for finding in examine(look(), read_plan("plan")):
        print(finding.level, finding.subject, finding.what, finding.advice)

`look` collects facts and `examine` judges them, so that any machine can be judged from its facts. Neither imports
torch: a separate process asks PyTorch what works.
"""

from trl_ext.doctor.examine import examine
from trl_ext.doctor.facts import Disk, Facts, Gpu, Kernels
from trl_ext.doctor.finding import Finding
from trl_ext.doctor.look import look

__all__ = ["Disk", "Facts", "Finding", "Gpu", "Kernels", "examine", "look"]
