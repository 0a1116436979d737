"""Words that the reading knows by name: programs, and variables of the environment."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Variables that name places, hosts and ranks: no finding depends on them.
PLACES = _words(
    """
HOME PWD OLDPWD USER LOGNAME HOSTNAME TMPDIR TMP SCRATCH WORK SHELL PATH PYTHONPATH LD_LIBRARY_PATH RANDOM
SECONDS EPOCHSECONDS UID LANG SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_NODEID SLURM_PROCID
SLURM_LOCALID SLURM_ARRAY_TASK_ID SLURM_ARRAY_JOB_ID SLURM_SUBMIT_DIR SLURM_JOB_NODELIST SLURM_NODELIST
SLURMD_NODENAME SLURM_RESTART_COUNT MASTER_ADDR MASTER_PORT RANK LOCAL_RANK NODE_RANK PMI_RANK
OMPI_COMM_WORLD_RANK CONDA_PREFIX VIRTUAL_ENV LINENO PPID BASHPID
"""
)
# Commands whose output is a place, a host, a port or a date.
QUIET = _words(
    """
pwd date hostname whoami id uname basename dirname realpath readlink scontrol shuf cd mktemp which git
curl wget openssl tty uuidgen logname
"""
)
# Commands that neither set variables nor start anything.
SILENT = _words(
    """
echo mkdir rm cp mv ls sleep wait kill ulimit module ml conda touch chmod date hostname cd pushd popd
trap umask alias shopt logger clear pip nvidia-smi rocm-smi git wget curl scontrol sacct squeue scancel ln
find tar df du free printenv jobs disown true :
"""
)
# Commands that are asked for their exit status, which cannot be known.
QUESTIONS = _words(
    """
grep egrep fgrep which type hash pgrep diff cmp lspci ping systemctl mountpoint python python3 ps stat
"""
)
SHELLS = _words("bash sh zsh dash ksh")
PREFIXES = _words("command builtin time nohup sudo nice stdbuf unbuffer setsid")
# Values that switch something on.
SWITCHED_ON = _words("1 true yes on y True TRUE ON YES enable enabled")
# Files that prepare a shell and set nothing of the run.
SETUP_FILES = _words(
    ".bashrc .bash_profile .profile bashrc profile activate conda.sh modules.sh setvars.sh bash"
)
