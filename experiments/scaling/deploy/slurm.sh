#!/bin/bash
# Shards as Slurm jobs: the driver is a job of its own, which trains nothing and hands in the workers'.
#   sbatch slurm.sh SPEC DIR WORKERS
# Handed in again with the same words, it goes on where it was. DIR must be on what all nodes share.
#SBATCH --job-name=jaxaudit
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:INT@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
SPEC=$1 DIR=$2 WORKERS=$3

# What Slurm told this job of itself is not for those that it hands in.
for name in ${!SLURM_@}; do unset "$name"; done

if [ -e "$DIR/spec.toml" ]; then
    exec jaxaudit resume "$DIR" --on slurm --workers "$WORKERS" --cpus 8 --gpus 1 --minutes 240
fi
exec jaxaudit run "$SPEC" -o "$DIR" --on slurm --workers "$WORKERS" --cpus 8 --gpus 1 --minutes 240
