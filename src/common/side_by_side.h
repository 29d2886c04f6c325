// Work of two directions of a layer on two streams. The portable build has src/stable/side_by_side.h in its
// place.
#pragma once

#include <ATen/core/Tensor.h>

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>

#include <map>
#endif

namespace lltm_ext {

#ifdef LLTM_EXT_WITH_CUDA
// This thread's second stream on a device. It is always the same one, because the allocator reuses a stream's
// memory on that stream only.
inline c10::cuda::CUDAStream side_stream(c10::DeviceIndex device) {
  thread_local std::map<c10::DeviceIndex, c10::cuda::CUDAStream> streams;
  const auto known = streams.find(device);
  if (known != streams.end()) return known->second;
  return streams.emplace(device, c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device))
      .first->second;
}

// Forks `side` from `stream`: both may run at the same time from here on. The destructor joins them, after an
// error too: `stream` waits for `side`.
class JoinedStream {
 public:
  JoinedStream(const c10::cuda::CUDAStream& stream, const c10::cuda::CUDAStream& side)
      : stream_(stream), side_(side) {
    begin_.record(stream);
    begin_.block(side);
  }
  JoinedStream(const JoinedStream&) = delete;
  JoinedStream& operator=(const JoinedStream&) = delete;
  ~JoinedStream() {
    try {
      end_.record(side_);
      end_.block(stream_);
    } catch (const c10::Error&) {  // the device has failed, which the next call reports
    }
  }

 private:
  const c10::cuda::CUDAStream stream_, side_;
  at::cuda::CUDAEvent begin_, end_;
};
#endif

// Calls f(i) for each direction. On CUDA the two run at the same time on two streams, because steps of one
// direction may leave multiprocessors idle. f must not allocate what outlives it: such memory belongs to the
// current stream.
template <typename F>
void run_side_by_side(const at::Tensor& like, size_t directions, F&& f) {
#ifdef LLTM_EXT_WITH_CUDA
  if (like.is_cuda() && directions == 2) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(like.get_device()),
                                side = side_stream(like.get_device());
    const JoinedStream joined(stream, side);
    f(0);
    const c10::cuda::CUDAStreamGuard guard(side);
    return f(1);
  }
#endif
  for (size_t i = 0; i < directions; ++i) f(i);
}

}  // namespace lltm_ext
