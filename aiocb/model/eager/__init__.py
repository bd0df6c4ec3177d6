"""Room of the transformers seam: any causal LM, module by module, over the paged cache. Worker thread.

Recurrent states, graphs and parallel execution of such models belong here too.
"""
