from harness.instances.modelled_macro import MacroBatch as MacroBatch
