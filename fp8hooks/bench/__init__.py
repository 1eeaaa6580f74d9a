"""`fp8hooks bench`: measurements, each runnable by anyone.

What `--out` writes, as JSON. Times are medians, memory is bytes of torch's allocator, errors are
`||g - g_exact|| / ||g_exact||` over all parameters' gradients; NaN stands where something was not measured.

`eager`: a list, for each size
    `{model, shape: {...}, tokens, dtype, device, torch, fp8hooks, ways: {way: result}}`, where a result is
    `{milliseconds, held, peak, error, truth, failure}`: of a step (forward and backward), what is allocated after
    forward and at most, beyond what was before, the error against the first way and against float32, and the error
    message of a way that failed (else null; all else is NaN then).
`compile`: `{way: result}`.
`te`: `{recipe: {way: result}}`.
`knob`: `{way: result}`, ours with `given_back` (the share), `host_bytes` and `original_bytes` besides.
`kernels`: a list of `{codec, dtype, what, gbytes_per_second, ratio, ...}`, `ratio` being to a copy of the same bytes.
`host`: `{context: microseconds a save}`.
`numerics`: a list of `{model, setting, error, median, worst, channel, bytes_per_element}`, see `numerics.Result`.
`convergence`, `te-training`: a list of `{setting, seed, losses, held_out, gradient_error}`.
`growth`: a list of `{axis, size, plain, ours, saves, gigabytes}`, milliseconds and GB, see `growth.Point`.
`fit`: a list of `{way, what, memory, largest, tokens_per_second}`, see `fit.Fit`.
`all`: a folder with these, and `index.json`: `{fp8hooks, torch, device, benches: {bench: "done" or why not}}`.
"""
