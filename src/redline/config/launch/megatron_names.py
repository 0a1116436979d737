"""Names of options that Megatron-LM's parser has and Redline's tree has not, so that unknown means unknown.

Names alone, without the dashes, each with whether a value follows. Those of the parser are of megatron-core
0.19; the older ones are of releases since 2020; those of forks are what public launch scripts of
Megatron-DeepSpeed, Pai-Megatron-Patch, MindSpeed and others pass. An option that the tree gains may stay
here: the tree is asked first.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in text.split())


# Options of the parser that take no value.
PARSER_SWITCHES = _names(
    """
adlr-autoresume allow-ambiguous-pad-tokens apply-residual-connection-post-layernorm async-ckpt-use-cpu-shm
batch-invariant-mode bert-no-binary-head biencoder-shared-query-context-model cache-mla-latents
calc-ft-timeouts ckpt-assume-constant-structure ckpt-convert-update-legacy-dist-opt-format
cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group dataloader-defer-npy-index-mmap
dataloader-fast-cache-load decode-only-cuda-graphs defer-embedding-wgrad-compute
delay-offload-until-cuda-graph dino-norm-last-layer disable-bf16-reduced-precision-matmul
disable-ckpt-load-validate-sharding-integrity disable-clone-scatter-output-in-embedding
disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
disable-flight-recorder-include-only-active disable-gloo-process-groups
disable-log-loss-scale-to-tensorboard disable-mamba-mem-eff-path disable-manual-gc-eval disable-msc
disable-straggler-on-startup disable-stream-ckpt-dequant disable-strict-fsdp-dtensor-load
disable-symmetric-registration disable-tokenizer-sentencepiece-ignore-extra-whitespaces
disable-tp-comm-split-ag disable-tp-comm-split-rs disable-use-tokenizer-model-from-checkpoint-args
dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient dsa-indexer-k-norm-fp32
dsa-indexer-rope-interleaved dsa-indexer-use-sparse-loss enable-chunked-prefill enable-experimental
enable-ft-package enable-full-sharding-in-hsdp enable-msc ep-overlap-early-attn-memory-release
exit-signal-handler-for-dataloader exit-signal-handler-for-training fake-process-group fim-data
fine-grained-activation-offloading flash-decode flight-recorder-include-stack-trace freeze-all-layers
fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration full-validation
grpo-filter-groups-with-same-reward high-priority-a2a-comm-stream hybrid-context-parallel
inference-cuda-graph-all-prefills inference-disable-ep-consensus inference-disable-triton-nvls-kernels
inference-dynamic-batching inference-dynamic-batching-prefix-caching
inference-dynamic-batching-track-generated-token-events
inference-dynamic-batching-track-paused-request-events inference-fuse-tp-communication
inference-moe-disable-fused-quant-kernels inference-rng-tracker inference-text-gen-server-logging
inference-use-synchronous-zmq-collectives inference-wandb-logging init-method-xavier-uniform
init-model-with-meta-device inprocess-empty-cuda-cache inprocess-restart is-hybrid-model lazy-mpu-init
load-main-params-from-ckpt log-device-memory-used log-world-size-to-tensorboard logits-load-ignore-errors
megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer mla-down-proj-fusion
moe-apply-probs-on-input moe-enable-deepep moe-enable-routing-replay moe-hybridep-pad-uneven-dispatch-inputs
moe-ncclep-static-shape moe-ncclep-zero-copy moe-pad-experts-for-cuda-graph-inference moe-paged-stash
moe-permute-fusion-into-hybridep moe-router-force-load-balancing moe-routing-trace-capture-hidden-states
moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-single-grouped-bias
moe-single-grouped-weight mtp-standalone multiple-validation-sets muon-nesterov muon-no-split-qkv
nccl-all-reduce-for-prefill no-barrier-with-level-1-timing no-ckpt-load-validate-sharding-integrity
no-clone-scatter-output-in-embedding no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu
no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
no-flight-recorder-include-only-active no-gradient-reduce-div-fusion no-inference-disable-ep-consensus
no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging no-initialization
no-log-loss-scale-to-tensorboard no-manual-gc-eval no-one-logger no-pin-cpu-grads no-pin-cpu-params
no-position-embedding no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle
no-rl-partial-rollouts no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
no-rl-use-sequence-packing no-rl-verify-model-weights-swap no-stream-ckpt-dequant
no-strict-fsdp-dtensor-load no-tokenizer-sentencepiece-ignore-extra-whitespaces
no-use-layer-wise-param-layout no-use-tokenizer-model-from-checkpoint-args
no-yarn-correction-range-round-to-int one-logger-async openai-gelu optimizer-cuda-graph
output-bert-embeddings overlap-dispatch-backward-with-experts-wgrad
perform-rl-step pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
pytorch-profiler-collect-shapes qk-clip record-shapes replication retriever-score-scaling
rl-inference-logprobs-is-correction rl-offload-inference-model-weights-when-idle
rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile
rl-skip-bos-token rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
run-workload-inspector-server sft skip-train te-rng-tracker test-mode tokenizer-hf-no-include-special-tokens
tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy torch-fsdp2-no-reshard-after-forward
trust-remote-code use-dist-ckpt use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-legacy-static-engine use-mp-args-from-checkpoint-args use-mup
use-one-sent-docs use-persistent-ckpt-worker use-ring-exchange-p2p use-same-sampling-seed-across-dp-ranks
use-te-activation-func use-torch-optimizer-for-cpu-offload verify-integrity vision-pretraining
yarn-correction-range-round-to-int
"""
)

# Options of the parser that take one value or several.
PARSER_VALUED = _names(
    """
activation-func-clamp-value activation-offload-fraction adlr-autoresume-interval app-tag-run-name
app-tag-run-version async-ckpt-cpu-priority async-ckpt-io-priority async-strategy batch-size
bert-embedder-type bert-load biencoder-projection-dim block-data-path chat-template
check-weight-hash-across-dp-replicas-interval ckpt-convert-save ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group classes-fraction
config-logger-dir cuda-graph-modules data-per-class-fraction decoder-num-layers decoder-seq-length
delta-offload-bytes-across-pp-ranks dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
dino-local-crops-number dino-local-img-size dino-teacher-temp dino-warmup-teacher-temp
dino-warmup-teacher-temp-epochs dist-ckpt-format dist-ckpt-workers distributed-timeout-seconds-after-init
dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-loss-coeff dsa-indexer-n-heads
dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq dsa-kernel-backend
dump-param-to-param-group-map embedding-path encoder-num-layers encoder-seq-length error-injection-rate
error-injection-type eval-global-batch-size eval-micro-batch-size evidence-data-path exit-signal
experimental-attention-variant expert-tensor-parallel-num-weight-shards fault-injector-delay-start-iteration
fault-injector-fault-delay fault-injector-fault-probabilities fault-injector-fault-types
fault-injector-mtti-seconds fault-injector-num-ranks fault-injector-offset-seconds fault-injector-ranks
fault-injector-seed fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
fine-grained-offloading-max-inflight-offloads flight-recorder-trace-buffer-size fp4-quantizer-factory
ft-num-warmup-iters glu-linear-offset gpu-sniff-test-interval grpo-clamp-eps-lower grpo-clamp-eps-upper
grpo-entropy-term-weight grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult
heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path high-priority-stream-groups
hybrid-layer-pattern hybrid-override-pattern ict-head-size ict-load img-h img-w indexer-batch-size
indexer-log-interval inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-max-tokens inference-cuda-graph-scope inference-dynamic-batching-async-sched-mode
inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb
inference-dynamic-batching-cuda-graph-mixed-prefill-count
inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
inference-dynamic-batching-paused-buffer-size-gb
inference-dynamic-batching-prefix-caching-coordinator-policy
inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
inference-dynamic-batching-unified-memory-level inference-grouped-gemm-backend
inference-logging-step-interval inference-max-requests inference-max-seq-length
inference-moe-token-dispatcher-type inference-shards inprocess-active-world-size inprocess-barrier-timeout
inprocess-completion-timeout inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval
inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations
inprocess-monitor-process-interval inprocess-monitor-thread-interval inprocess-progress-watchdog-interval
inprocess-soft-timeout inprocess-termination-grace-time iter-per-epoch iterations-to-skip kv-lora-rank
langrl-env-config linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
linear-num-value-heads linear-value-head-dim lion-beta1 lion-beta2 local-rank log-memory-interval
logging-level logits-load-decode-threads logits-load-dir logits-load-kd-loss-alpha
logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
logits-save-top-k logits-save-top-p logits-save-top-p-min-k mamba-head-dim mamba-inference-conv-states-dtype
mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim
mamba-training-ssm-states-dtype mask-factor mask-prob mask-type max-seqlen-per-dp-cp-rank max-tokens-to-oom
megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
mid-level-dataset-surplus min-offloaded-tensor-size mlp-chunks-for-prefill mlp-chunks-for-training
model-parallel-size moe-deepep-num-sms moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms
moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
moe-hybridep-num-sms-preprocessing moe-input-jitter-eps moe-latent-size moe-mlp-glu-interleave-size
moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
moe-router-force-biased moe-router-quantile-balancing-ema moe-routing-trace-max-training-iters
moe-routing-trace-path moe-shared-expert-glu-interleave-size moe-upcycling-granularity mrope-section mscale
mscale-all-dim muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum
muon-num-ns-steps muon-scalar-optimizer muon-scale-mode muon-tp-mode mup-attn-scale-power mup-base-head-dim
mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult no-rope-freq
no-weight-decay-cond-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
non-persistent-local-ckpt-dir null-tokenizer-eod-id null-tokenizer-pad-id num-channels num-classes
num-dataset-builder-threads num-speculative-tokens object-storage-cache-path offload-modules
one-logger-project one-logger-run-name onnx-safe outer-dp-sharding-strategy
override-ckpt-iteration patch-dim per-dataset-sequences-path phase-transition-iterations
pipeline-model-parallel-comm-backend q-lora-rank qk-clip-alpha qk-clip-threshold qk-head-dim
qk-pos-emb-head-dim query-in-block-prob refit-method relative-attention-max-distance
relative-attention-num-buckets replication-factor replication-jump result-rejected-tracker-filename
retriever-report-topk-accuracies rl-consumption-granularity rl-default-temperature rl-default-top-k
rl-default-top-p rl-generation-lag rl-importance-sampling-truncation-coef
rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-profile-dir rl-prompts-per-eval
rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-submission-granularity rope-type
rotary-scaling-factor sample-rate save-activations-interval save-dgrads-interval save-params-interval
save-retain-interval save-tokens-per-expert-interval save-wgrads-interval sft-tokenizer-prompt-format
sharp-enabled-group short-seq-prob softmax-type start-eval-at-iter straggler-ctrlr-port
straggler-minmax-count suggested-communication-unit-size swin-backbone-type symmetric-ar-type
tensor-parallel-num-weight-shards tensorboard-queue-size tiktoken-num-special-tokens tiktoken-pattern
titles-data-path tokenizer-metadata tokenizer-special-tokens train-sync-interval v-head-dim
validation-set-names vision-backbone-type vision-pretraining-type vocab-extra-ids warmup
wgrad-deferral-limit window-attn-skip-freq yaml-cfg yarn-beta-fast yarn-beta-slow
yarn-original-max-position-embeddings
"""
)

# Options of older releases.
OLDER_SWITCHES = _names(
    """
delay-grad-reduce delay-param-gather distribute-checkpointed-activations enable-one-logger expert-parallel
langrl-external-server legacy-tokenizer log-batch-size-to-tensorboard log-learning-rate-to-tensorboard
mmap-warmup moe-extended-tp moe-use-legacy-grouped-gemm no-async-tensor-model-parallel-allreduce
no-contiguous-buffers-in-local-ddp no-delay-grad-reduce no-load-lr-state no-log-learnig-rate-to-tensorboard
no-query-key-layer-scaling no-scatter-gather-tensors-in-pipeline override-lr-scheduler retro-add-retriever
retro-attention-gate retro-no-verify-neighbor-count standalone-embedding-stage use-checkpoint-lr-scheduler
use-contiguous-buffers-in-local-ddp use-flash-attn-triton use-legacy-models
"""
)

# Options of older releases with values.
OLDER_VALUED = _names(
    """
DDP-impl activations-checkpoint-method activations-checkpoint-num-layers cache-dir checkpoint-num-layers
data-impl encoder-pipeline-model-parallel-size encoder-tensor-model-parallel-size eval-batch-size
grpo-default-temperature grpo-default-top-p hybrid-attention-ratio hybrid-mlp-ratio
langrl-inference-server-type lazy-loader local_rank optimizer-offload-policy
pipeline-model-parallel-split-rank resume-dataloader retriever-seq-length retro-cyclic-train-iters
retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers retro-num-neighbors
retro-num-retrieved-chunks retro-project-dir retro-workdir tiktoken-special-tokens train-data
"""
)

# Options of forks.
FORK_SWITCHES = _names(
    """
variable-seq-lengths use-ascend-mc2 recompute-activation-function enable-recompute-layers-per-pp-rank
abort-on-unmet-fused-kernel-constraints checkpoint-in-cpu contigious-checkpointing cpu-optimizer
cpu_torch_adam create-moe-param-group data-efficiency-curriculum-learning deepgemm-fp8 deepscale deepspeed
deepspeed-activation-checkpointing deepspeed_mpi disable-mem-efficient-ln disable-moe-token-dropping
disable-moe-top2-2nd-expert-sampling ds-inference embed-layernorm enable-1f1b-v enable-exactly-numeric-match
enable-expert-tensor-parallelism enable-optimizer-post-validation enable-zbh1-exact-semantics
enable-zbh1-pipeline enable-zero-bubble force-ds-sequence-parallel goldfish-loss inference
is-instruction-dataset load-checkpoint-loosely log-optimizer-states-to-tensorboard
memory-centric-tiled-linear no-pipeline-parallel no-shared-storage partition-activations profile-backward
random-ltd return-data-index reuse-fp32-param reweight-loss-based-on-position-frequency scattered-embeddings
schedules-at-first split-transformers structured-logs swap-attention sync-tp-duplicated-parameters
synchronize-each-layer tokenizer-not-use-fast universal-checkpoint use-bnb-optimizer
use-cp-send-recv-overlap use-flash-attn-builder use-flash-attn-v1 use-flash-attn-v2 use-fused-rmsnorm
use-fused-rotary-pos-emb use-fused-swiglu use-llama2-rotary-position-embeddings use-mc2 use-pin-memory
use-repeated-dataloader use-tutel xielu zero-bubble-v-schedule zero-contigious-gradients zero-reduce-scatter
"""
)

# Options of forks with values.
FORK_VALUED = _names(
    """
ademamix-alpha ademamix-alpha-warmup ademamix-beta3 ademamix-beta3-warmup aml-data-download-path
attention-head-type codecarbon-dir config-name config-path context-parallel-algo dataset deepscale_config
deepspeed-config deepspeed_config ds-sequence-parallel-size epochs eval-only expert-interval
extra-vocab-size glu-activation goldfish-h goldfish-k kill-switch-path load-tag log-level log-level-replica
log-path lr-decay-tokens lr-warmup-tokens max-padding-length mean-noise-span-length mlp-type
moe-eval-capacity-factor moe-expert-parallel-size moe-loss-coeff moe-min-capacity moe-train-capacity-factor
noise-density num-key-value-heads pad-vocab-size-to patch-tokenizer-type pp-partition-method prompt-type
remote-device rope-theta skip-train-iteration-range sparse-mode structured-logs-dir
test-weighted-split-paths test-weighted-split-paths-path tile-factor tokenizer-file tokenizer-name-or-path
topk train-dataset-path train-mode train-tokens train-weighted-split-paths train-weighted-split-paths-path
transformer-type trigger-path valid-data valid-dataset-path valid-num-workers valid-weighted-split-paths
valid-weighted-split-paths-path wandb-entity-name wandb-project-name zero-allgather-bucket-size
zero-bubble-adaptive-memory-limit zero-bubble-max-pending-backward zero-bubble-pipeline-timers-end-iter
zero-bubble-pipeline-timers-start-iter zero-reduce-bucket-size zero-stage
"""
)

SWITCHES = PARSER_SWITCHES | OLDER_SWITCHES | FORK_SWITCHES
VALUED = PARSER_VALUED | OLDER_VALUED | FORK_VALUED

# Keys of NeMo's trainer section and of FlagScale's runner: facts of the launch, not of the training.
NODE_KEYS = frozenset({"num_nodes", "nnodes"})
PROCESS_KEYS = frozenset({"devices", "nproc_per_node", "num_gpus"})
LAUNCH_KEYS = NODE_KEYS | PROCESS_KEYS
# Keys of NeMo's model section whose names differ from Megatron-LM's.
NEMO_KEYS = {
    "encoder_seq_length": "seq_length",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
}
