"""Adapters that put the library into other frameworks, in the host's own terms.

`transformers` wraps any Hugging Face causal language model as a target or a draft model; `smollm2`
loads the demo model. Nothing is imported here: each module needs packages of the `demo` extra.
"""
