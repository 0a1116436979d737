"""What `redline train` trains when nothing is given: minutes on two cores, on Python's standard library."""

DEMO_VOCAB_SIZE = 4096  # of the tokenizer trained on the demo corpus; other data brings its own
DEMO = {
    "demo": {
        "num_layers": 4,
        "hidden_size": 192,
        "ffn_hidden_size": 512,
        "num_attention_heads": 6,
        "group_query_attention": True,
        "num_query_groups": 2,
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_length": 256,
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "train_iters": 750,
        "eval_interval": 150,
        "eval_iters": 16,
        "lr": 3e-3,
        "min_lr": 3e-4,
        "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.05,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
    }
}
