#!/usr/bin/env bash
# Tests Slurm for real and from nothing: installs it where it is missing, starts a cluster of two nodes on this machine,
# submits the templates to it, and ends all that it has started.
#
#     tests/jobs/run slurm [OPTIONS OF PYTEST]
#
# Needs root, and Debian or Ubuntu where Slurm is missing; `python` on PATH has axonmpi[test] and an MPI library.
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
cd "$(dirname "$0")/../../.."
begun=$SECONDS

# `command -v` of several names is content with one of them.
missing=()
for program in munged slurmctld slurmd sbatch ip nsenter; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing+=("$program")
done
if [ "${#missing[@]}" -gt 0 ]; then
    echo "installing ${missing[*]}"
    # RUNLEVEL=1 keeps apt from starting services: the tests have daemons of their own.
    install=(env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends)
    install+=(-o DPkg::Lock::Timeout=120 slurmctld slurmd slurm-client munge libpmix2 iproute2 util-linux)
    "${install[@]}" >/dev/null || { apt-get update -qq && "${install[@]}" >/dev/null; }
    # Slurm opens this file, which Debian has in a package of headers only.
    for folder in /usr/lib/*/pmix2/lib; do
        [ -e "$folder/libpmix.so" ] || ln -s libpmix.so.2 "$folder/libpmix.so"
    done
    echo "installed in $((SECONDS - begun)) s"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
AXONMPI_TEST_SLURM=1 python -m pytest -q --durations=5 "$@" tests/jobs/slurm 2>&1 | tee "$log"
if tail -n 1 "$log" | grep -q skipped; then
    echo "Some of these tests were skipped: this machine cannot run Slurm." >&2
    exit 1
fi
echo "tests/jobs/run slurm: $((SECONDS - begun)) s"
