#!/bin/bash
# One rank under plain srun, without torchrun: SLURM starts a process a device and says which one it is.
#
#   srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --kill-on-bad-exit=1 examples/srun.sh train MODEL --data DATA
#
# mmcompile does not read SLURM's variables by itself: they are set in every shell of a job, also where no ranks were started, and
# a script that runs alone there would wait for others that never come.
set -euo pipefail

export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
# srun listens for its tasks on the machine it was called on; ranks meet on the first machine of the job instead.
export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
exec mmcompile "$@"
