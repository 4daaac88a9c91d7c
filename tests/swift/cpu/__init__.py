"""What lets the real `megatron sft` and `swift sft` train on a machine without an accelerator.

    tiny_model.py                 makes model folders of random weights
    standin/                      for PYTHONPATH of the training processes, never of the tests'
      transformer_engine/         NVIDIA's package in plain torch, as far as a dense GPT needs it
      cpu_as_cuda.py              torch.cuda calls land on the CPU; installed by the former where CPU_AS_CUDA=1
    startup/sitecustomize.py      for PYTHONPATH too: quicker imports
    warm_server.py, _client.py    commands and ranks as forks of a process that has imported most, see ../warm.py

Everything else is the real thing: ms-swift, megatron-core and mcore-bridge as released, torchrun, gloo between the
processes, sampler, collator and DataLoader workers. Nothing is said about speed or numbers on a GPU.
"""
