"""What everything stands on.

    input and output    checks · names · plain · files · devices · budget (how much is held at once)
    one formula         attention (plain scores) · positions, forms (any other) · tangents (derivatives) · freedom
                        (what factors leave free) · counting · conditions
    objects             layer · factored · operator (what linear scores compute) · words (a form in words) ·
                        examples · results · measured (errors that a certificate counts)
    examples            sources (drawn, asked) · oracle (asked on the way) · shards (on disk) · capture (of a
                        model at work)
    models              modules (from_torch), checkpoints (files), replaced (back into a model), convert (torch's
                        own); below them configs, weights, stored, sites, calls, asking
    comparing           same (compare) · match · gauge (heads free of gauge) · behaviour (what heads do);
                        below them causes, sides, inputs
"""
