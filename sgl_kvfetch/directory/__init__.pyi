from .local import LocalStore as LocalStore, StoreUsage as StoreUsage, open_store as open_store
