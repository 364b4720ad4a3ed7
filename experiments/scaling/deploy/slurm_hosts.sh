#!/bin/bash
# Lanes that need more devices than a host has: one program over several hosts, a process on each.
#   sbatch slurm_hosts.sh SPEC DIR
# Handed in again with the same words, it goes on where it was. DIR must be on what all nodes share.
#SBATCH --job-name=jaxaudit-hosts
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=1-00:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
SPEC=$1 DIR=$2

if [ -e "$DIR/spec.toml" ]; then
    exec srun jaxaudit resume "$DIR" --distributed
fi
exec srun jaxaudit run "$SPEC" -o "$DIR" --distributed
