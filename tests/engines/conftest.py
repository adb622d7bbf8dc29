"""No doctest is looked for in what breaks the process that imports it.

The servers break ``os.fork``; what stands in for ``sitecustomize`` hides the package, and pytest
would add its folder to the paths that processes of the tests get.
"""

collect_ignore = ["servers", "stand_in_bare"]
