"""Forecasts of when waiting jobs will start: which are made next, the worker process, and the job history behind them."""
