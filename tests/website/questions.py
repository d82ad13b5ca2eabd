"""Questions that a newcomer asks, the links to click from the first page, and the answer."""

QUESTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    # Asked in issue 32.
    "Which encoding for a new language model?": (("Choose",), "a new language model"),
    "What does breaks mean?": (("Start", "Glossary"), "breaks if by more than 25 %"),
    "Half or adjacent pairs?": (("Start", "Glossary"), "pairs feature t with t + d/2 (Llama"),
    "Does it reproduce Kazemnejad et al.?": (
        ("Results", "Copy"),
        "Does it reproduce Kazemnejad et al. (2023)? In part",
    ),
    "How to cite?": (("About", "Cite"), "@software{posenc"),
    "Faster DeBERTa?": (("Speed up",), "DeBERTa-v3"),
    "Stretch Qwen3 to 131k and serve it by vLLM?": (
        ("Stretch",),
        "vllm serve longer --max-model-len 131072",
    ),
    "How much memory does that take?": (("Stretch",), "take 14.0 GiB in Qwen3-0.6B"),
    "Install, which systems and processors?": (("Start", "Install"), "AVX-512: Intel servers"),
    "Does it run on JAX?": (("Start", "Install"), "there is no version for JAX"),
    "RoPE with a picture?": (("Methods", "rope"), "rotates each pair of query and key features"),
    "What is a Grid?": (("Start", "Glossary"), "The pairs of a query layout and a key layout"),
    "What is a Layout?": (("Start", "Glossary"), "Where the tokens of a sequence are"),
    # Written down before the site was built.
    "How do I use only a bias in my own SDPA or FlexAttention call?": (
        ("Guides", "Keep your own attention"),
        "encoding.score_mod(grid)",
    ),
    "I use x-transformers: what is alibi_pos_bias here?": (
        ("Guides", "Move from another library"),
        "alibi_pos_bias=True",
    ),
    "Can I add a method without changing posenc?": (
        ("Guides", "Add a method"),
        '[project.entry-points."posenc.encodings"]',
    ),
    "Does it run on a GPU?": (("Start", "Install"), "On CUDA attention runs on Triton kernels"),
    "How do I pack documents, or pad on the left?": (
        ("Guides", "Your own model"),
        'padded = Layout.padded([32, 20], side="left")',
    ),
    "Can a BERT with a learned table take longer texts?": (
        ("Results", "stretching"),
        "no longer table is of use before it is trained",
    ),
    "Why is YaRN worse for short texts?": (
        ("Results", "stretching"),
        "The pair that turns about once within L",
    ),
    "How do I train one long sequence over several GPUs?": (
        ("Guides", "Over machines"),
        "posenc.distributed.attend",
    ),
    "How do I undo it, and does save_pretrained still work?": (
        ("Speed up",),
        "restore(model) undoes it to the bit",
    ),
    "Which positions does this model use, and how far?": (
        ("Guides", "Diagnose"),
        "Limits are lengths beyond which outputs are undefined",
    ),
    "Where is the formula that all of them share?": (("Understand",), "four places"),
    "Which bugs of other libraries does it not have?": (
        ("About", "Bugs others had"),
        "half and adjacent pairs mixed up",
    ),
    # Of readers who know transformers.
    "Does it use FlashAttention?": (("Start", "Glossary"), "FlashAttention among them"),
    "Which version of transformers does it need?": (
        ("Start", "Install"),
        "transformers 5.19 or newer",
    ),
    "Does it run on a Mac's GPU?": (("Start", "Install"), "such as Apple’s mps"),
    "Does it work with LoRA and with quantised weights?": (
        ("Speed up",),
        "quantised weights, PEFT (LoRA)",
    ),
    "What if I ask for attention weights?": (("Speed up",), "attention weights that you asked for"),
    "How do I get a sliding window?": (("Guides", "Your own model"), "A sliding window is window="),
    "How do I decode with a KV cache?": (("Guides", "Your own model"), "cache=cache[0]"),
    "Can I export to ONNX?": (("Guides", "Your own model"), "torch.onnx.export(model"),
    "Does ALiBi work where heads are no power of two?": (
        ("Methods", "alibi"),
        "where heads are no power of two",
    ),
    "Which models use ALiBi?": (("Methods", "alibi"), "BLOOM, MPT"),
    "How do I set rope_theta?": (("Methods", "rope"), "sets the slowest frequency"),
    "What is config's partial_rotary_factor here?": (
        ("Guides", "Move from another library"),
        'create("rope", fraction=',
    ),
    "Must I train after YaRN?": (("Extensions", "yarn"), "works without fine-tuning"),
    "Is it dynamic NTK that spoils a cache?": (
        ("About", "Bugs others had"),
        "cached keys keep the frequencies of a shorter text",
    ),
    "How do I give a ViT larger images?": (("Stretch",), "of images (ViT, DeiT, DINOv2, BEiT"),
    "How does Qwen2-VL number image tokens?": (("Methods", "mrope"), "Qwen2-VL"),
    "Does it upload anything or run a repository's code?": (
        ("Diagnose",),
        "Code from the folder itself (trust_remote_code) never runs",
    ),
    "How do I find out how far my model really reads?": (
        ("Guides", "Evaluate"),
        "one effective length with an interval",
    ),
    "How much slower than SDPA is T5's bias over 2,048 tokens?": (("Results", "Speed"), "2,048"),
    "How do I use it in cross-attention?": (
        ("Start", "Glossary"),
        "Grid(layout, other) cross-attention",
    ),
    "Is Gemma 3 among the models that accelerate serves?": (
        ("Reference", "Models of transformers"),
        "gemma3",
    ),
    "Are outputs the same after accelerate?": (
        ("Speed up",),
        "outputs and gradients are the same up to rounding",
    ),
    "Does it know grouped-query attention?": (("Start", "Five-minute tour"), "grouped-query heads"),
    "Can I compute DeepSeek's latent attention (MLA)?": (
        ("Guides", "Other forms of attention"),
        "all heads then share one head of keys",
    ),
    "I have cu_seqlens for flash_attn_varlen_func: which layout is that?": (
        ("Guides", "Your own model"),
        "Layout.packed(cu_seqlens.diff().tolist())",
    ),
    "Does it train with FSDP?": (("Guides", "Over machines"), "DDP or FSDP2"),
    "What do I check in CI after a command?": (("Reference", "Command line"), "Exit codes: 0 done"),
    "Does it run on Windows?": (("Start", "Install"), "Windows among them"),
    "Does llama.cpp take a stretched model?": (("Stretch",), "that a GGUF file needs"),
    "What does unlearned in my report mean?": (
        ("Start", "Glossary"),
        "a model has not learned the trained length",
    ),
    "What does differs beside an engine mean?": (
        ("Start", "Glossary"),
        "it rotates as transformers does",
    ),
    "What becomes of rope_theta in config.json after NTK?": (
        ("Extensions", "Which extension"),
        "a larger rope_theta",
    ),
    "Is there a notebook for Colab?": (("Start",), "Notebooks for Jupyter and Colab"),
    "Where are the pages of an older release?": (("About",), "beside earlier ones"),
    "Which license, and how do I contribute?": (("About",), "a method in one file"),
}
