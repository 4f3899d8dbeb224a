"""Starting runs: the ranks of this machine (`ranks`); elsewhere, what a launch consists of (`job_plan`), the site's settings
(`site`), and NeMo-Run (`nemo`).

Needs neither torch nor, but for `nemo`, NeMo-Run.
"""

from megatron_rl.launch.job_plan import LaunchError, Task, chain, one, sweep
from megatron_rl.launch.site import Site, read_site
