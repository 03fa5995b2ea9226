#!/bin/bash
# Trains for longer than one job may run, also where Slurm takes nodes away for more urgent jobs: stops in time,
# saves, puts itself back into the queue, and goes on at the step where it stopped.
#
#     sbatch slurm/requeue.sh --steps 100000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --nodes=8 slurm/requeue.sh --steps 100000

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi
# Nodes.
#SBATCH --nodes=2
# Ranks on each node.
#SBATCH --ntasks-per-node=4
# Cores for each rank. axonmpi gives each rank its share of them as threads.
#SBATCH --cpus-per-task=2
# The time of one turn, as hours:minutes:seconds. The training may take as many turns as it needs.
#SBATCH --time=04:00:00
# The job may go back into the queue.
#SBATCH --requeue
# Slurm sends this script (B) the signal USR1 so many seconds before the time is up. They have to be enough for a
# step and for saving. A site that preempts jobs can have it sent then, too (preempt_send_user_signal).
#SBATCH --signal=B:USR1@120
# What the job prints: %x is its name, %j its number. All turns have the same number, so they add to one file.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append

# End at the first command that fails, and take a variable that is not set for a mistake.
set -euo pipefail

# Make Python, axonmpi and MPI available as on the login node. Slurm hands on the environment of the shell
# that called sbatch, so with everything loaded there these lines can stay as they are: comments.
# module load python openmpi
# source "$HOME/venv/bin/activate"

# Let each rank use any core of the job, instead of binding it to a single one, where threads would queue up.
# The first is read by Open MPI 5, the second by Open MPI 4; MPICH binds nothing by itself.
export PRTE_MCA_hwloc_default_binding_policy=none
export OMPI_MCA_hwloc_base_binding_policy=none

# Start the ranks, beside this script, which has to hear the signal meanwhile. --resume auto goes on from the
# newest checkpoint in the run's folder, axonmpi-runs/NAME; the name is the same in each turn. Checkpoints on the
# way are for what comes without a signal, such as a node that fails.
mpirun -n "$SLURM_NTASKS" axonmpi train --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" \
    --resume auto --checkpoint-every 500 "$@" &
ranks=$!

# Hand the signal on to mpirun, and so to the ranks: they end the step, save, and end with code 85.
# (SIGTERM is left alone: it means scancel, after which the job must not come back.)
stopped=no
trap 'stopped=yes; kill -USR1 "$ranks" || true' USR1

# Wait for the ranks. The signal ends a `wait` before them; the last one tells their code.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks" || true
done
code=0
wait "$ranks" || code=$?

# Unfinished: back into the queue. Other codes than 85 are errors, unless the job was told to stop: ranks that
# were still starting when the signal came have died of it.
if [ "$code" -eq 85 ] || { [ "$code" -ne 0 ] && [ "$stopped" = yes ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
