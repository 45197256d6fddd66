"""Programs that a cluster has and this machine has not, as short scripts on the PATH."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLURM = {
    # Takes the script on standard input, and starts it.
    "sbatch": """
cat > $FOLDER/job.sh
nodes=$(sed -n 's/^#SBATCH --nodes=//p' $FOLDER/job.sh)
SLURM_JOB_ID=7 SLURM_NNODES=$nodes setsid bash $FOLDER/job.sh > $FOLDER/out 2>&1 < /dev/null &
echo $! > $FOLDER/group
echo $nodes > $FOLDER/nodes
echo "Submitted batch job 7"
""",
    # One task per node; nodes are loopback addresses, which stand for their names. Each has eight
    # GPUs, of which others have some.
    "srun": """
while [[ $1 == --* ]]; do shift; done
left=(0,1 6,7 GPU-8a3b)
for ((node = 0; node < SLURM_NNODES; node++)); do
  code=${3//"{socket.gethostname()}"/127.0.0.$((node + 2))}
  export CUDA_VISIBLE_DEVICES=${left[node]}
  SLURM_NODEID=$node SLURM_PROCID=$node "$1" "$2" "$code" &
done
wait
""",
    "squeue": """
if ! kill -0 $(cat $FOLDER/group) 2> /dev/null; then echo '{"jobs": []}'; exit; fi
for ((node = 0; node < $(cat $FOLDER/nodes); node++)); do
  names+="{\\"name\\": \\"127.0.0.$((node + 2))\\"},"
done
allocation="{\\"nodes\\": {\\"allocation\\": [${names%,}]}}"
echo "{\\"jobs\\": [{\\"job_state\\": [\\"RUNNING\\"], \\"job_resources\\": $allocation}]}"
""",
    "scancel": "\nkill -- -$(cat $FOLDER/group)\n",
}
FULL_SLURM = {
    "sbatch": '\ncat > /dev/null; echo "Submitted batch job 7"\n',
    # Whatever becomes of the job.
    "squeue": """
touch $FOLDER/asked
echo '{"jobs": [{"job_state": ["PENDING"]}]}'
""",
    "scancel": "\necho $1 >> $FOLDER/cancelled\n",
}
"""Nothing ever starts."""
SSH = {
    # Its process is the connection. Without, what runs there goes on, and its input has ended.
    "ssh": """
host=${@: -2:1}
echo $$ > $FOLDER/$host.ssh
mkfifo $FOLDER/$host.input
setsid bash -c "echo \\$\\$ > $FOLDER/$host.pid; exec ${@: -1}" < $FOLDER/$host.input &
exec cat > $FOLDER/$host.input
"""
}
SSH_WITHOUT_A_KEY = {
    "ssh": """
host=${@: -2:1}
if [[ $host == 127.0.0.3 ]]; then
  until [[ -s $FOLDER/127.0.0.2.pid ]]; do sleep 0.05; done
  echo "me@$host: Permission denied (publickey)." >&2
  exit 255
fi"""
    + SSH["ssh"]
}
"""To one of two machines."""
NVML = """
class NVMLError(Exception):
    pass


class Memory:
    total = 80 * 10**9


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 8


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(handle):
    return "stand-in"


def nvmlDeviceGetCudaComputeCapability(handle):
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle):
    return Memory
"""


@contextlib.contextmanager
def stand_ins(folder: Path, programs: dict[str, str]) -> Iterator[dict[str, str]]:
    """An environment with these programs, and eight GPUs; a job of theirs is gone at the end."""
    for name, text in programs.items():
        path = folder / name
        path.write_text("#!/bin/bash" + text.replace("$FOLDER", str(folder)))
        path.chmod(0o755)
    modules = folder / "modules"
    modules.mkdir()
    (modules / "pynvml.py").write_text(NVML)
    try:
        yield {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{modules}"}
    finally:
        if (folder / "group").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int((folder / "group").read_text()), signal.SIGKILL)
