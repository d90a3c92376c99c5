"""Control plane of fault-tolerant training: who is a member, which generation runs, and which steps are committed."""
