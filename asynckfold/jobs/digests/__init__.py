"""What the live objects of a run are, by value: named digests, by which a changed one is told.

::

    model 'net'     forward()                  code:5be1…     the loaded code, see `bytecode`
                    Block.forward()            code:90aa…     … and what it looks up
                    the global WIDTH           =64
    opt_fn          the closure variable lr    =0.01
    criterion       weight                     #77d0…         tensors and all else, by content
    eval_transform  step 1 (Resize).size       =(32, 32)

The user's own functions and classes are followed: code, defaults, closures, the globals that are
read, base classes. Those of libraries go by name; their versions are checked elsewhere. Nothing
depends on addresses, on the order of sets and dicts, on names of modules or on where files lie.

::

    parts       Digest: live objects → components by name
    values      a value → a short text          states      what an object has
    bytecode    a function → its form           ownership   the user's own, or a library's
    changes     two plans → what changed, in words
"""
