"""Balancers: which samples each component processes together, each by name and each usable alone.

| name | what it does | module |
|---|---|---|
| arrival, sorted-round-robin, disttrain | baselines | `baselines` |
| post-balance, post-balance-packed, -padded, -quadratic, -convolution | OrchMLLM: each component by itself | `post_balance`, `lengths`, `lpt` |
| node-local | the same, moving as little as possible between nodes | `node_local` |
| joint | DFLOP: all components at once, under memory limits | `buckets`, `refine`, `exact` |
| hierarchical, hierarchical-all | Entrain: microbatches by encoder work, language-model work deferred | `hierarchical`, `deferral` |
| auto | the fastest of several, never slower than arrival order | `auto` |

`registry` has them by name. What follows from an assignment: `exchange` (which rows go where), `rearrange` (which rank gets which
batch), `bounds` (what it achieves, and what nothing can beat).
"""
