"""Search of a model's layout: prices of chains, candidates, the search `auto`, and the final choice by the simulator."""
