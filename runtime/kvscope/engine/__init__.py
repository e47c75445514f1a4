"""The paged-KV engine: block pool, block tables, scheduler, sampler, model runner and step loop."""
