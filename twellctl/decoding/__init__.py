"""From a loaded model to the tokens after many prompts at once. It knows no text and no HTTP.

`opening` makes an engine from a model. Below it, each on top of the next: `decode_engine` (a thread
around it, asyncio outside), `scheduler` (which sequences go on: `admission` knows who has pages,
`reports` what became of whom), `batch` (rows on the device, in `rounds`, as CUDA graphs),
`step_end` (with `sampler`: which tokens follow), and a `decoder` (the model, over a `paged_cache`):
`torch_decoder` drives any model of transformers, `kernel_decoder` Llama and its kin over our own
kernels (`step_plan` measures which, of `few_ways` and `whole_step`). `engine` is what those above
see of it all. `bulk` is for texts that nobody waits for token by token: it fills a `batch` of many
rows, over a `torch_decoder` whose rows lie in consecutive pages (`run_attention`).
"""
