// What checks ask about a tensor. The portable build has src/stable/tensor.h in its place.
#pragma once

#include <ATen/core/Tensor.h>

namespace lltm_ext {

// Whether the dispatcher, which raw bindings bypass, replaces x by other tensors before a kernel sees it:
// Python's subclasses with __torch_dispatch__, fake tensors among them, and the tensors of torch.func.
inline bool is_wrapper(const at::Tensor& x) {
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched,
                                           c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor});
  return x.unsafeGetTensorImpl()->key_set().has_any(kWrappers);
}

// Returns false for freed storage and wrappers. A kernel only reads the sizes of a meta tensor.
inline bool has_memory(const at::Tensor& x) {
  if (x.has_storage()) {
    // Avoids data_ptr(), which copies a lazy clone and throws for a fake tensor.
    c10::StorageImpl* storage = x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (storage->_mutable_data_ptr_no_checks().get() != nullptr) return true;
  }
  return x.is_meta() || (x.has_storage() && x.sym_numel() == 0);
}

}  // namespace lltm_ext
