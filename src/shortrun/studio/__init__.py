"""A page on which one sees the method work: ``shortrun studio``.

Gradio is an optional extra: ``pip install 'shortrun[studio]'``.
"""
