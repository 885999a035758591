"""The public dashboard: watches a run as a read-only member of its swarm, and shows it.

    collector ──▶ intake ──▶ board ──▶ broadcast ──▶ app ──▶ page
    (network)     (hostile   (what is    (one picture   (REST, events,
                   bytes)     known)      for all)       first paint)
                               │
                               ▼
                             store (SQLite: series, events, contributors)

It imports `swarm` and nothing of `peer`: it is one more onlooker, with no more rights than any
other. `report` and `replay` need no network: they read a run's `events.jsonl`.
"""
