#!/bin/bash
# Trains on several nodes, with the mpirun of your MPI library, where srun does not speak its protocol:
#
#     sbatch slurm/several_nodes_mpirun.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --nodes=8 slurm/several_nodes_mpirun.sh --steps 1000

# The job's name, as squeue shows it.
#SBATCH --job-name=axonmpi
# Nodes.
#SBATCH --nodes=2
# Ranks on each node.
#SBATCH --ntasks-per-node=4
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

# Where nodes have several networks and the library takes the wrong one, name the right one (ip -brief address):
# export UCX_NET_DEVICES=ib0 HYDRA_IFACE=ib0                            # MPICH
# export OMPI_MCA_btl_tcp_if_include=ib0 PRTE_MCA_prte_if_include=ib0   # Open MPI over TCP

# Start the ranks. mpirun learns from Slurm which nodes there are and how many ranks each has, and starts its
# daemons there. The job's number in the run's name keeps the files of an earlier run: axonmpi-runs/NAME.
mpirun -n "$SLURM_NTASKS" axonmpi train --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
