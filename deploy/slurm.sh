#!/usr/bin/env bash
# Train on several nodes of a Slurm cluster, requeued until the run has reached its end:
#     sbatch --nodes=4 deploy/slurm.sh mnist --towers 4 --workdir runs/mnist
# What stands behind the name of this script goes to `lockstep train`; the workdir has to be on a file system of all nodes.
#
# One task a node: on each, Lockstep starts a worker for each of the GPUs. Adapt these lines to the cluster:
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --output=lockstep-%j.log
#
# Two minutes before the time is over each task gets SIGUSR1: all save at the same step, and leave with exit code 75.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

# The secret by which the processes of this run know each other; srun hands it on to all tasks.
LOCKSTEP_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export LOCKSTEP_KEY

# A task that ends leaves the others in peace: Lockstep itself ends them, and says why.
srun --kill-on-bad-exit=0 lockstep train --grace 110 "$@"
code=$?
if [ "$code" -eq 75 ]; then # all is saved, and there is more to do
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
