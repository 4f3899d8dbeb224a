"""Exit codes of a run: one list for the command, the ranks and the sbatch scripts.

A signal that ended a process shows as 128 + its number, as in a shell. REQUEUE and STALLED are answered with a requeue.
"""

OK = 0
FAILED = 1  # an error that a new attempt would meet again
BAD_INPUT = 2  # the recipe or its data; also argparse's own
PREFLIGHT = 3  # a node or the cluster is not fit for the job; the report names it
REQUEUE = 75  # stopped on request with everything saved (EX_TEMPFAIL of sysexits.h): the same command continues
STALLED = 76  # a phase or collective went past its deadline; the post-mortem names rank and place
OUT_OF_MEMORY = 77  # of the device; the post-mortem has the phase's memory and what would help
