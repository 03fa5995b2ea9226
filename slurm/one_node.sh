#!/bin/bash
# Trains on one node, with the mpirun of your MPI library:
#
#     sbatch slurm/one_node.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --ntasks=16 slurm/one_node.sh --steps 1000

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi
# One node. For more than one: several_nodes.sh.
#SBATCH --nodes=1
# Ranks.
#SBATCH --ntasks=4
# Cores for each rank. axonmpi gives each rank its share of them as threads.
#SBATCH --cpus-per-task=2
# Slurm ends the job after this time, as hours:minutes:seconds.
#SBATCH --time=00:30:00
# What the job prints: %x is its name, %j its number.
#SBATCH --output=%x-%j.out

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

# Start the ranks. The job's number in the run's name keeps the files of an earlier run: axonmpi-runs/NAME.
mpirun -n "$SLURM_NTASKS" axonmpi train --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
