#!/bin/bash
# Trains once for each of several learning rates, as the tasks of a job array. Each stops in time, saves, puts
# itself back into the queue, and goes on at the step where it stopped, as in requeue.sh.
#
#     sbatch slurm/array.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --array=1,3 slurm/array.sh --steps 1000

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi
# The numbers of the tasks; %2: not more than two of them at a time.
#SBATCH --array=0-3%2
# Nodes of each task.
#SBATCH --nodes=1
# Ranks of each task.
#SBATCH --ntasks=4
# Cores for each rank. axonmpi gives each rank its share of them as threads.
#SBATCH --cpus-per-task=2
# The time of one turn of a task, as hours:minutes:seconds.
#SBATCH --time=00:30:00
# A task may go back into the queue.
#SBATCH --requeue
# Slurm sends this script (B) the signal USR1 so many seconds before the time is up. They have to be enough for a
# step and for saving.
#SBATCH --signal=B:USR1@120
# What a task prints: %x is the job's name, %A the array's number, %a the task's. Further turns are added.
#SBATCH --output=%x-%A_%a.out
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

# What is different from task to task.
rates=(1e-3 2e-3 3e-3 5e-3)
rate=${rates[$SLURM_ARRAY_TASK_ID]}

# The task's name for Slurm, ARRAY_TASK. Not $SLURM_JOB_ID: for one of the tasks that is the array's own number.
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Start the ranks, beside this script, which has to hear the signal meanwhile. --resume auto goes on from the
# newest checkpoint in the run's folder, axonmpi-runs/NAME; the name is the same in each turn.
mpirun -n "$SLURM_NTASKS" axonmpi train --name "$SLURM_JOB_NAME-$task" --lr "$rate" \
    --resume auto --checkpoint-every 500 "$@" &
ranks=$!

# Hand the signal on to mpirun, and so to the ranks: they end the step, save, and end with code 85.
# (SIGTERM is left alone: it means scancel, after which the task must not come back.)
stopped=no
trap 'stopped=yes; kill -USR1 "$ranks" || true' USR1

# Wait for the ranks. The signal ends a `wait` before them; the last one tells their code.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks" || true
done
code=0
wait "$ranks" || code=$?

# Unfinished: back into the queue. Other codes than 85 are errors, unless the task was told to stop: ranks that
# were still starting when the signal came have died of it.
if [ "$code" -eq 85 ] || { [ "$code" -ne 0 ] && [ "$stopped" = yes ]; }; then
    scontrol requeue "$task"
fi
exit "$code"
