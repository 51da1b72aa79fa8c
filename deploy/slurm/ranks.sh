#!/bin/bash
#SBATCH --job-name=ranks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=HUP@180

# A rank on each node, with actors of its own. In the environment that has the package:
#   sbatch deploy/slurm/ranks.sh --config cartpole_ddppo --run-dir /shared/ddppo
# The nodes share the folder. The same command goes on with the run, until that is over.

# Without it torchrun's restarts often fail.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Jobs of one node must not meet each other's ranks.
port=$((20000 + SLURM_JOB_ID % 10000))

exec srun --cpu-bind=none --kill-on-bad-exit=0 python -m torch.distributed.run \
    --nnodes="$SLURM_NNODES" --nproc-per-node=1 --max-restarts=100 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(hostname):$port" \
    -m impala_async.train --resume auto "$@"
