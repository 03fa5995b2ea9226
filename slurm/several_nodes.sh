#!/bin/bash
# Trains on several nodes, with Slurm's own launcher, srun:
#
#     sbatch slurm/several_nodes.sh --steps 1000
#
# What stands behind the script's name goes on to `axonmpi train`. What stands before it goes to Slurm and
# comes before the lines below:  sbatch --nodes=8 slurm/several_nodes.sh --steps 1000

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

# srun has to speak the protocol by which your MPI library learns who its ranks are. Where the choice below is
# not the right one, say it yourself:  SRUN_MPI=pmix_v5 sbatch slurm/several_nodes.sh
if [ -z "${SRUN_MPI:-}" ]; then
    # Which MPI library does Python load? (Asking does not start MPI.)
    library=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])')
    # What that library speaks, the usual first.
    case $library in
        "Open MPI") spoken="pmix" ;;
        Cray*) spoken="cray_shasta pmi2" ;;
        *) spoken="pmi2" ;;
    esac
    # What this site's srun speaks; some versions print the list as an error.
    offered=$(srun --mpi=list 2>&1)
    for interface in $spoken; do
        if grep -qw "$interface" <<<"$offered"; then
            SRUN_MPI=$interface
            break
        fi
    done
    if [ -z "${SRUN_MPI:-}" ]; then
        echo "$library speaks $spoken, and srun offers none of these:" "$offered" >&2
        echo "Set SRUN_MPI to one that fits, or start the ranks with mpirun, as one_node.sh does." >&2
        exit 1
    fi
fi

# Intel MPI also wants to be told where Slurm's library for pmi2 is:
# export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so

# Start the ranks: as many as the lines above ask for.
#   --cpus-per-task        srun does not take this over from the job by itself
#   --kill-on-bad-exit     end the job when a rank is killed, instead of waiting for it
# The job's number in the run's name keeps the files of an earlier run: axonmpi-runs/NAME.
srun --mpi="$SRUN_MPI" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    axonmpi train --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
