"""The serving engine: one model, one process, the OpenAI API.

    HTTP (aiohttp, one event loop)          engine thread
    ------------------------------          -------------
    server   ── submit / cancel ──────────► engine ── plan ──► scheduler + blocks   (pure Python)
    openai_api, chat, text                     │      run ───► runner ► model ► attention, sampler (torch)
    metrics  ◄── deltas, once per step ────────┘      text ──► detokenise, stop strings

Importing this package imports neither torch nor aiohttp: `busbar --help` stays instant, and the
scheduler is tested without either. See README.md beside this file for the promises and the limits.
"""
