#!/bin/bash
# Runs tests on the ranks of a job: axonmpi's own, or those of your program. Submit it from the folder they are in:
#
#     sbatch slurm/tests.sh
#
# What stands behind the script's name goes on to pytest. What stands before it goes to Slurm and comes before the
# lines below:  sbatch --nodes=2 --ntasks=4 slurm/tests.sh tests/conformance

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi-tests
# One node. On several the tests use the network, too.
#SBATCH --nodes=1
# Ranks: as many as the largest test asks for, in axonmpi's own suite 4.
#SBATCH --ntasks=4
# Cores for each rank.
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

# Run the tests that are marked for so many ranks or fewer. The job fails where one of them fails on one rank.
mpirun -n "$SLURM_NTASKS" pytest -q "$@"
