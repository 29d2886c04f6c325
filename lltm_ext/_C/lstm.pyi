# No raw bindings: importing the module registers torch.ops.lltm_ext.lstm and its kin.
