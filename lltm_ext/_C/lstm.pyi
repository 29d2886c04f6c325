# No bindings: importing the module registers its dispatcher ops.
