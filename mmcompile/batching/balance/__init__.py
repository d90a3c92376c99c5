"""Balancers: which samples each component processes together, each by name and each usable alone.

    arrival, sorted-round-robin, disttrain   baselines
    post-balance                             OrchMLLM: each component by itself, by seconds; also
                                             post-balance-packed, -padded, -quadratic, -convolution, by tokens
    node-local                               the same, moving as little as it can between nodes
    joint                                    DFLOP: all components at once, under memory limits
    hierarchical, hierarchical-all           Entrain: microbatches by encoder work, language-model work deferred
    auto                                     the fastest of several, never slower than arrival order

`registry` has them by name. `assignment` is what they return, `bucket_bounds` what it achieves, and what nothing can beat.
"""
