"""Imported by the server from which ranks are forked: DeepSpeed, with what it imports at its first use."""

import deepspeed
import deepspeed.module_inject.auto_ep_config
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.sequence_parallel.parallel_state_sp
import deepspeed.runtime.zero.muon.muon_optimizer

# An all-reduce for inference through shared memory, which on CPU init_distributed compiles first: half a minute of C++,
# and a rank that is ended meanwhile leaves a lock on which all later ones wait.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
