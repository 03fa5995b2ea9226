#!/bin/bash
# Trains in a container, by Apptainer, on several nodes, which need no Python and no MPI. To make the container, in a
# folder with axonmpi's sources, write these lines into axonmpi.def, without the marks:
#
#     Bootstrap: docker
#     From: python:3.12-slim
#     %files
#         . /opt/axonmpi
#     %post
#         pip install --no-cache-dir '/opt/axonmpi[mpich]'
#
# and type
#
#     apptainer build axonmpi.sif axonmpi.def
#     sbatch slurm/apptainer.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --nodes=8 slurm/apptainer.sh --steps 1000

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

# The container. Another one:  IMAGE=/path/to/other.sif sbatch slurm/apptainer.sh
image=${IMAGE:-axonmpi.sif}

# Start the ranks: srun starts a container for each, and the MPI library in it asks srun who its ranks are.
#   --mpi=pmi2             for a container with MPICH, as above; with Open MPI pmix
#   --cpus-per-task        srun does not take this over from the job by itself
#   --kill-on-bad-exit     end the job when a rank is killed, instead of waiting for it
#   --sharens              ranks of a node share one namespace, without which they cannot share memory; since
#                          Apptainer 1.3. Singularity, where it is installed with setuid, needs no such option
#   --bind, --pwd          the folder from which the job was submitted is the container's, too; its runs go there
# The job's number in the run's name keeps the files of an earlier run: axonmpi-runs/NAME.
srun --mpi="${SRUN_MPI:-pmi2}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    apptainer exec --sharens --bind "$PWD" --pwd "$PWD" "$image" \
    axonmpi train --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
