#!/bin/bash
# train.py on the nodes of snippets/train.hostfile, without ssh. On each node:
#   NODE_RANK=0 MASTER_ADDR=node-0 bash snippets/train.hostfile.sh
# NODE_RANK is the node's line in the hostfile, from 0.
deepspeed --no_ssh --no_local_rank \
    --hostfile "${HOSTFILE:-snippets/train.hostfile}" \
    --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" \
    --master_port "${MASTER_PORT:-29500}" \
    snippets/train.py "$@"
