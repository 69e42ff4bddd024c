from .local import LocalStore as LocalStore, StoreUsage as StoreUsage
from .open import open_store as open_store
