"""Digests of a run's live objects, by which a changed one is named.

::

    model 'net'     forward()                  code:5be1…     the loaded code, see `bytecode`
                    Block.forward()            code:90aa…     … and what it looks up
                    the global WIDTH           =64
    opt_fn          the closure variable lr    =0.01
    criterion       weight                     #77d0…         tensors and all else, by content
    eval_transform  step 1 (Resize).size       =(32, 32)

The user's functions and classes are followed: code, defaults, closures, globals, base classes.
Those of libraries go by name; their versions are checked elsewhere. Nothing depends on addresses,
on the order of sets and dicts, on module names or on file locations.

::

    run         live objects → Digest: parts, each by its components
    parts       one part → components by name, values as short texts
    objects     an object's settings        ownership   the user's own, or a library's
    bytecode    a function → its form       changes     two plans → what changed, in words
"""
